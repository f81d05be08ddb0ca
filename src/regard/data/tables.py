"""Read columns of text from Parquet files and from folders that the `datasets` library saved to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from regard.data.delimited import ReadOptions
from regard.errors import UserError

BATCH_ROWS = 1000  # read at once: bounds the memory
NESTED = "translation"  # a column of structs with a field for each language, as in datasets of the Hugging Face Hub
Decode = Callable[[Any], str]  # from the number of a class to its name


def parquet_rows(path: Path, options: ReadOptions) -> Iterator[tuple[str, ...]]:
    """The selected columns of a Parquet file."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise UserError(f"{path}: Parquet files need pyarrow: pip install 'regard[datasets]'") from None
    try:
        with ParquetFile(path) as file:
            columns = _columns(path, file.schema_arrow, options)
            batches = file.iter_batches(BATCH_ROWS, columns=_top_level(columns))
            yield from _texts(path, file.schema_arrow, columns, batches, {})
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path}: {error}".splitlines()[0]) from error


def dataset_rows(folder: Path, options: ReadOptions) -> Iterator[tuple[str, ...]]:
    """The selected columns of a dataset that `Dataset.save_to_disk` wrote; classes are read by their names."""
    splits = sorted(child.name for child in folder.iterdir() if (child / "state.json").exists())
    if splits:
        names = ", ".join(splits)
        raise UserError(f"{folder} holds the splits {names}: name one of them, such as {folder / splits[-1]}")
    if not (folder / "state.json").exists():
        hint = f'for the files in it, use a glob such as "{folder.name}/*.parquet"'
        raise UserError(f"cannot read {folder}: a folder, but not one that Dataset.save_to_disk wrote; {hint}")
    try:
        from datasets import ClassLabel, load_from_disk
    except ImportError:
        raise UserError(f"{folder}: a dataset on disk needs datasets: pip install 'regard[datasets]'") from None
    try:
        dataset = load_from_disk(str(folder))
    except Exception as error:  # the library raises errors of many types for damaged files
        raise UserError(f"cannot read {folder}: {error}".splitlines()[0]) from error
    schema = dataset.features.arrow_schema
    columns = _columns(folder, schema, options)
    classes = {name: kind.int2str for name, kind in dataset.features.items() if isinstance(kind, ClassLabel)}
    batches = dataset.select_columns(_top_level(columns)).with_format("arrow").iter(BATCH_ROWS)
    yield from _texts(folder, schema, columns, batches, classes)


def _columns(path: Path, schema: Any, options: ReadOptions) -> list[tuple[str, ...]]:
    """The selected columns: (name,), or ("translation", name) for a field of that column."""
    names = list(schema.names)
    nested: Any = schema.field(NESTED).type if NESTED in names else None
    inner = [nested.field(index).name for index in range(getattr(nested, "num_fields", 0))]
    wanted: Sequence[str | int] = options.columns or options.names
    if options.columns is None and len(names) == len(wanted) and not set(wanted) <= {*names, *inner} and not inner:
        wanted = names
    columns: list[tuple[str, ...]] = []
    for column in wanted:
        if isinstance(column, int) and column > len(names):
            raise UserError(f"{path} has no column {column}: there are {len(names)}")
        name = names[column - 1] if isinstance(column, int) else column
        if name not in names and name not in inner:
            listed = ", ".join([*names, *(f"{NESTED}.{field}" for field in inner)])
            raise UserError(f"{path} has no column {name!r}: it has {listed}; set data.columns")
        columns.append((name,) if name in names else (NESTED, name))
    return columns


def _top_level(columns: Iterable[tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(column[0] for column in columns))


def _texts(
    path: Path, schema: Any, columns: list[tuple[str, ...]], batches: Iterable[Any], classes: dict[str, Decode]
) -> Iterator[tuple[str, ...]]:
    import pyarrow
    from pyarrow import compute

    for column in columns:
        kind = schema.field(column[0]).type
        kind = kind.field(column[1]).type if len(column) == 2 else kind
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if column[0] not in classes and not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise UserError(f"{path}: the column {'.'.join(column)!r} holds {kind}, not text; set data.columns")
    first = 1
    for batch in batches:
        values = []
        for name, *inner in columns:
            array = compute.struct_field(batch.column(name), inner) if inner else batch.column(name)
            texts = array.to_pylist()
            if array.null_count:
                where = ".".join([name, *inner])
                raise UserError(f"{path}, row {first + texts.index(None)}: the column {where!r} is null")
            values.append([classes[name](text) for text in texts] if name in classes else texts)
        yield from zip(*values, strict=True)
        first += len(values[0])
