"""Real servers as child processes on the loopback interface, for the tests of the remote tier."""
