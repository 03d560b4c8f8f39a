"""`--whole-tables`: a table of rows is one test of pytest's, whose own work takes longer than most rows do.

All rows are tried, and those that fail are named. Without the option each row is a test with a name of its own.
Tables are left as they are of tests that are asynchronous, are methods or may fail, of properties, and of those with
fixtures that a row may change, asked for by name or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest

# Fixtures that all rows of a test may share: values, and what is done after a test, whatever it did.
UNCHANGED = {"connector", "fields_of", "make_pair", "order", "run"} | {"_uncollected", "closed"}
PYTESTS_OWN = {"event_loop_policy", "request"}
SHOWN = 5  # failures with all that there is to say of them; others have their names only
NAME_LENGTH = 60
ParameterSet = type(pytest.param())
ROW_FAILS = (Exception, SystemExit, pytest.fail.Exception)
ROW_TELLS_NOTHING = (pytest.skip.Exception, pytest.xfail.Exception)


class Table:
    """The rows of one `parametrize`, by name."""

    def __init__(self, names: str | Sequence[str], rows: Sequence[Any], ids: Any = None) -> None:
        self.names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        self.rows = [(self._name(row, place, ids), self._values(row)) for place, row in enumerate(rows)]

    def _values(self, row: Any) -> Sequence[Any]:
        values: Sequence[Any] = row.values if isinstance(row, ParameterSet) else row if len(self.names) > 1 else (row,)
        assert len(values) == len(self.names), f"{values!r} for {self.names}"
        return values

    def _name(self, row: Any, place: int, ids: Any) -> str:
        if isinstance(row, ParameterSet) and row.id:
            return str(row.id)
        if isinstance(ids, list):
            return str(ids[place])
        return "-".join(str((ids and ids(value)) or value)[:NAME_LENGTH] for value in self._values(row))


class Tables:
    """The tables of one test, as the only value of the parameter that stands for all of theirs."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row of one table with each of the others, as `parametrize` has them."""
        names = [name for table in self.tables for name in table.names]
        for rows in product(*(table.rows for table in self.tables)):
            values = (value for _, values in rows for value in values)
            yield " ".join(name for name, _ in rows), dict(zip(names, values, strict=True))

    def run(self, test: Callable[..., None], **fixtures: Any) -> None:
        """pytest's Skipped: of all rows; or XFailed."""
        failed, skipped, count = list[tuple[str, BaseException]](), None, 0
        for name, row in self.rows():
            count += 1
            try:
                answer = test(**fixtures, **row)  # type: ignore[func-returns-value]
                assert answer is None, "a test says nothing by what it returns"
            except ROW_TELLS_NOTHING as exc:
                skipped, count = exc, count - 1
            except ROW_FAILS as exc:
                exc.add_note(f"in the row {name}")
                failed.append((name, exc))
        if failed:
            names = ", ".join(name for name, _ in failed)
            raise BaseExceptionGroup(f"{len(failed)} of {count} rows: {names}", [exc for _, exc in failed[:SHOWN]])
        if skipped and not count:
            raise skipped


class WholeTables:
    """A plugin of pytest's."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        definition = metafunc.definition
        marks = [mark for mark in definition.own_markers if mark.name == "parametrize"]
        tables = [read(mark) for mark in reversed(marks)]
        if not marks or None in tables or not is_plain(metafunc.function) or definition.get_closest_marker("xfail"):
            return
        whole = Tables([table for table in tables if table])
        names = [name for table in whole.tables for name in table.names]
        if metafunc.cls or set(metafunc.fixturenames) - {*names, *UNCHANGED, *PYTESTS_OWN}:
            return
        definition.own_markers[:] = [mark for mark in definition.own_markers if mark not in marks]
        metafunc.parametrize(names, [[whole] * len(names)], ids=["all rows"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        whole = next((value for value in given.values() if isinstance(value, Tables)), None)
        if whole is None:
            return None
        whole.run(pyfuncitem.obj, **{name: value for name, value in given.items() if value is not whole})
        return True


def is_plain(test: Callable[..., Any]) -> bool:
    return not inspect.iscoroutinefunction(test) and not hasattr(test, "hypothesis")


def read(mark: pytest.Mark) -> Table | None:
    """None if its rows have to be tests of their own."""
    if len(mark.args) != 2 or mark.kwargs.keys() - {"ids"}:
        return None
    names, rows, ids = *mark.args, mark.kwargs.get("ids")
    if not rows or isinstance(rows, Iterator) or isinstance(ids, Iterator):  # to be read once only
        return None
    if any(isinstance(row, ParameterSet) and row.marks for row in rows):
        return None
    return Table(names, list(rows), ids if ids is None or callable(ids) else list(ids))
