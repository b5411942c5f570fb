"""pure. Records as libraries of tables write them: a file for each kind of record and way.

    python tables_written.py FOLDER

It needs datasets, pandas, polars, DuckDB, jq, and pyspark with Java 17, and imports nothing of this
project: `make tables` runs it in an environment of its own. `KINDS` has the records, which
FOLDER/records.json repeats. What a library cannot write is left out.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

_TEXT, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
Record = dict[str, Any]


def _turn(role: str, content: Any, **more: Any) -> Record:
    return {"role": role, "content": content, **more}


def _chat(question: Any, answer: Any) -> Record:
    return {"messages": [_turn("user", question), _turn("assistant", answer)]}


def _tool(name: str, properties: Record) -> Record:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _called(name: str, arguments: Any, properties: Record) -> Record:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    turns = [_turn("user", "q"), _turn("assistant", "", tool_calls=[call])]
    return {"messages": turns, "tools": [_tool(name, properties)]}


def _calls(schema: Record, *values: Any) -> list[Record]:
    return [_called("f", {"x": value}, {"x": schema}) for value in values]


KINDS: dict[str, list[Record]] = {
    "chats": [_chat("q", "a\n\n1."), _chat("é", " b ")],
    "content that is a list of parts": [_chat([{"type": "text", "text": "q"}], "a")] * 2,
    "content like numbers": [_chat("1", "007"), _chat("3.5", "1.50")],
    "content like dates": [_chat("2024-01-02", "2024-01-03")] * 2,
    "content like times": [_chat("2024-01-02T03:04:05", "2024-01-03T03:04:05")] * 2,
    "a column in some records": [{**_chat("q", "a"), "system": "s"}, _chat("q", "a")],
    "a column in later records": [_chat("q", "a"), {**_chat("q", "a"), "weight": 0.3}],
    "text like numbers": [{"text": "007"}, {"text": "1.50"}],
    "answers in JSON": [
        {"instruction": "i", "input": "", "output": '{"a": 1}'},
        {"instruction": "j", "input": "x", "output": "[1, 2]"},
    ],
    "prompt and completion": [{"prompt": 'q,\n"x"', "completion": "a"}] * 2,
    "tokens and labels": [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [4, 5], "labels": [-100, 5]},
    ],
    "calls of one tool": _calls(_TEXT, "Paris", "Rome"),
    "calls of unlike tools": [
        _called("f", {"a": 1}, {"a": _WHOLE}),
        _called("g", {"b": "x", "c": [1]}, {"b": _TEXT, "c": {"type": "array", "items": _WHOLE}}),
    ],
    "arguments of unlike types": _calls({}, 1, "one", [1]),
    "floats": _calls(_NUMBER, 0.1, 1e-8, 0.30000000000000004),
    "whole numbers above 2^53": _calls(_WHOLE, 2**53 + 1, -(2**62)),
    "whole numbers above 2^64": _calls(_WHOLE, 2**70, 1),
    "arguments that are null": _calls({"type": ["string", "null"]}, None, "a"),
    "free objects": _calls({"type": "object"}, {"a": [{"b": 1.5, "c": None}]}, {"d": {"k": "v"}}),
    "no arguments": [_called("f", {}, {})] * 2,
    "times with T": _calls(_TEXT, "2024-01-02T03:04:05", "2024-05-06T07:08:09"),
    "times with T and Z": _calls(_TEXT, "2024-01-02T03:04:05Z", "2024-05-06T07:08:09Z"),
    "dates": _calls(_TEXT, "2024-01-02", "2024-05-06"),
    "arguments as JSON text": [_called("f", '{"a": 1, "z": null}', {"a": _WHOLE})] * 2,
    "turns as JSON text": [{"messages": json.dumps(_chat("q", "a")["messages"])}] * 2,
    "xLAM": [
        {
            "query": "q",
            "answers": json.dumps([{"name": "f", "arguments": {"x": 1}}]),
            "tools": json.dumps([{"name": "f", "parameters": {"x": {"type": "int"}}}]),
        }
    ]
    * 2,
    "keys in two orders": _calls({}, {"b": 1, "a": 2}, {"a": 3, "b": 4}),
    "a key twice": _calls({}, {"b": 1, "a": 2}, {"a": 3, "b": 4}),
}
_TWICE = {"a key twice": ('"b"', '"a"')}
"""Kind -> what is replaced in its lines of JSON: names of keys, so that one stands twice."""

Make = Callable[[], Any]
Write = Callable[[str], Any]


def _save(make: Make, method: str, path: str, **options: Any) -> None:
    getattr(make(), method)(path, **options)


def _datasets_ways(rows: list[Record], source: str, cache: str) -> Iterator[tuple[str, Write]]:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    makers: dict[str, Make] = {
        "load_dataset": partial(
            datasets.load_dataset, "json", data_files=source, split="train", cache_dir=cache
        ),
        "from_list": partial(datasets.Dataset.from_list, rows),
        "from_generator": partial(
            datasets.Dataset.from_generator, lambda: iter(rows), cache_dir=cache
        ),
    }
    for name, make in makers.items():
        for method, suffix in (("to_json", "jsonl"), ("to_parquet", "parquet"), ("to_csv", "csv")):
            yield f"datasets {name}, {method}.{suffix}", partial(_save, make, method)
        yield f"datasets {name}, to_json.json", partial(_save, make, "to_json", lines=False)


def _pandas_ways(rows: list[Record], source: str) -> Iterator[tuple[str, Write]]:
    import pandas

    make = partial(pandas.DataFrame, rows)
    lines: dict[str, Any] = {"orient": "records", "lines": True}
    yield "pandas, to_json lines.jsonl", partial(_save, make, "to_json", **lines)
    for orient in ("records", "columns", "index", "split", "values", "table"):
        yield f"pandas, to_json {orient}.json", partial(_save, make, "to_json", orient=orient)
    yield "pandas, to_parquet.parquet", partial(_save, make, "to_parquet")
    yield "pandas, to_csv.csv", partial(_save, make, "to_csv", index=False)
    read = partial(pandas.read_json, source, lines=True)
    yield "pandas, read_json and to_parquet.parquet", partial(_save, read, "to_parquet")

    def read_parquet() -> Any:
        make().to_parquet(source + ".parquet")
        return pandas.read_parquet(source + ".parquet")

    yield "pandas, read_parquet and to_json.jsonl", partial(_save, read_parquet, "to_json", **lines)


def _polars_ways(rows: list[Record], source: str) -> Iterator[tuple[str, Write]]:
    import polars

    makers: dict[str, Make] = {
        "DataFrame": partial(polars.DataFrame, rows),
        "read_ndjson": partial(polars.read_ndjson, source),
    }
    for name, make in makers.items():
        for kind in ("ndjson", "json", "parquet", "csv"):
            yield f"polars {name}, write_{kind}.{kind}", partial(_save, make, f"write_{kind}")


def _duckdb_ways(source: str) -> Iterator[tuple[str, Write]]:
    import duckdb

    def copy(options: str, kind: str, path: str) -> None:
        rows = f"select * from read_json('{source}', format='newline_delimited'{options})"
        duckdb.sql(f"copy ({rows}) to '{path}' (format {kind})")

    for name, options in (("", ""), (" of JSON", ", maximum_depth=1")):
        for kind in ("parquet", "json", "csv"):
            yield f"DuckDB, copy{name}.{kind}", partial(copy, options, kind)


def _jq_ways(source: str) -> Iterator[tuple[str, Write]]:
    import jq

    def filtered(program: str, path: str) -> None:
        lines = Path(source).read_text().splitlines()
        texts = [jq.compile(program).input_text(line).text() for line in lines]
        Path(path).write_text("".join(f"{text}\n" for text in texts))

    yield "jq, the identity.jsonl", partial(filtered, ".")
    yield "jq, a key set.jsonl", partial(filtered, '. + {source: "x"}')
    yield "jq, walk.jsonl", partial(filtered, "walk(.)")


def _spark_ways(source: str) -> Iterator[tuple[str, Write]]:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    session = spark.config("spark.sql.shuffle.partitions", "1").getOrCreate()
    session.sparkContext.setLogLevel("OFF")

    def save(kind: str, options: Record, path: str) -> None:
        folder = Path(f"{path}.folder")
        frame = session.read.json(source).coalesce(1)
        frame.write.options(**options).format(kind).save(str(folder))
        (part,) = folder.glob("part-*")
        part.rename(path)
        shutil.rmtree(folder)

    for kind, suffix, options in (
        ("json", "jsonl", {}),
        ("parquet", "parquet", {}),
        ("csv", "csv", {"header": "true"}),
    ):
        yield f"Spark, read.json and write.{kind}.{suffix}", partial(save, kind, options)
    kept = {"ignoreNullFields": "false"}
    yield "Spark, read.json and write.json with nulls.jsonl", partial(save, "json", kept)


def write_all(folder: Path) -> None:
    """Writes FOLDER/NUMBER/WAY.SUFFIX for each kind, by its number, and FOLDER/records.json with
    all records.
    """
    folder.mkdir(parents=True)
    read: dict[str, list[Record]] = {}
    for number, (kind, made) in enumerate(KINDS.items()):
        here = folder / str(number)
        here.mkdir()
        source = folder / f"{number}.jsonl"
        text = "".join(json.dumps(row) + "\n" for row in made)
        source.write_text(text.replace(*_TWICE.get(kind, ("", ""))))
        rows = read[kind] = [json.loads(line) for line in source.read_text().splitlines()]
        ways = [
            *_datasets_ways(rows, str(source), str(folder / "cache")),
            *_pandas_ways(rows, str(source)),
            *_polars_ways(rows, str(source)),
            *_duckdb_ways(str(source)),
            *_jq_ways(str(source)),
            *_spark_ways(str(source)),
        ]
        for name, write in ways:
            path = here / name
            try:
                write(str(path))
            except BaseException:  # polars panics, which is no Exception
                path.unlink(missing_ok=True)
                shutil.rmtree(f"{path}.folder", ignore_errors=True)
    (folder / "records.json").write_text(json.dumps(read))


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
