"""Errors: one tree, drawn in the module's docstring, and messages that say where."""

from __future__ import annotations

import inspect
import pickle

import pytest

from kvkeep import errors
from kvkeep.errors import BackendError, BackendTimeoutError, KVKeepError, MissingExtraError


def tree() -> dict[str, type[Exception]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }


def test_every_error_stands_in_the_drawn_tree_and_has_one_root():
    for name, error in tree().items():
        assert issubclass(error, KVKeepError)
        assert name in errors.__doc__


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("IdentityError", ValueError),
        ("TokenError", ValueError),
        ("MaskError", ValueError),
        ("LayoutError", ValueError),
        ("OwnershipError", RuntimeError),
        ("BackendError", RuntimeError),
        ("CodecError", ValueError),
        ("LookupServiceError", RuntimeError),
        ("MissingExtraError", ImportError),
    ],
)
def test_errors_are_the_builtin_kind_that_callers_expect(name, builtin):
    assert issubclass(tree()[name], builtin)


def test_a_backend_error_says_backend_operation_and_key():
    error = BackendTimeoutError("no answer", backend="Disk", operation="get", key=b"\xab" * 32)
    assert str(error) == "Disk.get(abababababababab): no answer"
    assert (error.backend, error.operation, error.key) == ("Disk", "get", b"\xab" * 32)
    assert str(BackendError("full", backend="Disk", operation="put")) == "Disk.put: full"


def test_a_missing_extra_names_the_command():
    assert "pip install 'kvkeep[vllm]'" in str(MissingExtraError("The connector", "vllm"))


@pytest.mark.parametrize(
    "error",
    [
        BackendTimeoutError("late", backend="Disk", operation="get", key=b"\x01" * 32),
        BackendError("full", backend="Disk", operation="put"),
        MissingExtraError("The connector", "vllm"),
    ],
)
def test_errors_survive_a_trip_between_processes(error):
    """An engine may carry them from its worker: an error that cannot be rebuilt hides itself."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
