"""Codecs: the self-describing form in which chunks leave memory."""
