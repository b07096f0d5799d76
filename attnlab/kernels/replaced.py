"""Values and attributes that are replaced for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def setting(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Give a context variable a value inside the block; yield it."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextmanager
def replacing(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give an object other attributes inside the block."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
