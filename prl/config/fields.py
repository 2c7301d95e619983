"""`opt`: a schema field with its default, its doc and its bounds in one place."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import field
from functools import cache
from typing import Any


@cache
def hints(schema: type) -> dict[str, Any]:
    """Field -> type of a schema; reading annotations is slow and each schema is visited several times."""
    return typing.get_type_hints(schema)


def opt(
    default: Any = NO_DEFAULT,
    doc: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: tuple[Any, ...] | None = None,
    replaced: bool = False,
) -> Any:
    """A dataclass field that knows its doc and its valid range.

    Without `default` and `factory` the field is mandatory (`???` in Hydra). The bounds apply to numbers
    and to each entry of a list of numbers; numbers must be finite in any case. A `replaced` table does not
    merge: what the user sets replaces the default as a whole.
    """
    bounds = {"gt": gt, "ge": ge, "lt": lt, "le": le, "choices": choices, "replaced": replaced or None}
    metadata = {"doc": doc, **{name: bound for name, bound in bounds.items() if bound is not None}}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default="???" if default is NO_DEFAULT else default, metadata=metadata)
