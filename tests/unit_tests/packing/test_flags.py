"""Dataclasses to flags and back: every type, the YAML file, and what a user does wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from megatron.packing.flag_faults import nearest
from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, parse_flags


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Engine of the car."""

    num_cylinders: int
    """How many cylinders; 100% of them.
    """
    bore: float = 8.5
    """Width of a cylinder."""
    turbo: bool = False
    """Compress the air."""
    filtered: bool = True
    """Clean the air."""
    fuel: Literal["petrol", "diesel"] = "petrol"
    """What it burns."""
    starter: Literal["electric", "crank"] | None = None
    """What starts it."""

    def __post_init__(self) -> None:
        if self.num_cylinders < 1:
            raise ValueError(f"--num-cylinders must be at least 1, but is {self.num_cylinders}")


@dataclass(frozen=True, kw_only=True)
class Body:
    """Body of the car."""

    colors: tuple[str, ...] = ()
    """From the front to the back."""
    num_doors: int | None = None
    """How many doors."""
    length: float | None = None
    """In meters."""
    name: str | None = None
    """What it is called."""


CAR = Command(about="A car.")
NEEDED = ["--num-cylinders", "4"]


def parse(*arguments):
    engine, body = parse_flags((Engine, Body), [*NEEDED, *arguments], CAR)
    return engine, body


def message_of(*arguments):
    with pytest.raises(FlagError) as failure:
        parse_flags((Engine, Body), arguments, CAR)
    message = str(failure.value)
    assert "\n" not in message
    return message


@pytest.fixture
def write_yaml(tmp_path):
    """Return a function that writes a YAML file and returns its path."""

    def write(text, name="car.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turbo", "True"], "--turbo takes no value; drop True"),
        (["--name", "True", "--turbo", "True"], "--turbo takes no value; drop True"),
        (["--turbo", "false"], "--turbo takes no value; drop both, or pass --no-turbo"),
        (["--turbo", "red"], "'red' belongs to no option; options begin with --, see --help"),
        (["--turbo=yes"], "--turbo takes no value, but has 'yes'; pass --turbo or --no-turbo"),
        (["car.yaml"], "'car.yaml' belongs to no option; for a file of options pass --config"),
        (["--bore", "9", "-t"], "'-t' belongs to no option; options begin with --, see --help"),
    ],
)
def test_words_of_no_option(arguments, message):
    """HuggingFace's switches take True and False; "unrecognized arguments: True" names no flag."""
    assert message_of(*NEEDED, *arguments) == message


def test_defaults_are_those_of_the_dataclass():
    """A parser with defaults of its own would train with other numbers than the dataclass
    documents.
    """
    assert parse() == (Engine(num_cylinders=4), Body())


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (("--bore", "9.25"), "bore", 9.25),
        (("--bore=1e-3",), "bore", 0.001),
        (("--bore", "-0.5"), "bore", -0.5),
        (("--num-doors", "3"), "num_doors", 3),
        (("--num-doors", "-3"), "num_doors", -3),
        (("--length", "4"), "length", 4.0),
        (("--turbo",), "turbo", True),
        (("--turbo", "--no-turbo"), "turbo", False),
        (("--no-filtered",), "filtered", False),
        (("--fuel", "diesel"), "fuel", "diesel"),
        (("--starter", "crank"), "starter", "crank"),
        (("--name", "a b"), "name", "a b"),
        (("--name=--turbo",), "name", "--turbo"),
        (("--name", "Grüße"), "name", "Grüße"),
        (("--bore", "1", "--bore", "2"), "bore", 2.0),
    ],
)
def test_each_type(arguments, field, expected):
    """A value of another type (an int that stays text, a Literal that is refused) would fail late,
    or never.
    """
    engine, body = parse(*arguments)
    value = getattr(engine, field, None) if hasattr(engine, field) else getattr(body, field)
    assert value == expected
    assert type(value) is type(expected)


def test_bore_in_scientific_notation_may_be_negative():
    """Python before 3.14 takes -1e-3 for an option of its own; it must reach the dataclass, whose
    message is better.
    """
    assert parse("--bore=-1e-3")[0].bore == -0.001


@pytest.mark.parametrize("colors", [["red"], ["red", "blue", "a b"]])
def test_tuple_takes_all_values_up_to_the_next_flag(colors):
    """Only the first of several data files would be read."""
    body = parse("--colors", *colors, "--turbo")[1]
    assert list(body.colors) == colors


def test_values_of_all_groups_come_back_in_their_order():
    """Two groups that swap places would be read by name all the same, until a name is in both."""
    engine, body = parse("--name", "x", "--fuel", "diesel")
    assert isinstance(engine, Engine)
    assert isinstance(body, Body)


def test_help_is_the_docstrings(capsys):
    """A field whose docstring is not found has no help; a percent sign in one breaks --help
    altogether.
    """
    with pytest.raises(SystemExit) as done:
        parse_flags((Engine, Body), ["--help"], CAR)
    assert done.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "A car.",
        "Engine of the car:",
        "Body of the car:",
        "How many cylinders; 100% of them.",
        "Width of a cylinder. (default: 8.5)",
        "Compress the air.",
        "--turbo, --no-turbo",
        "{petrol,diesel}",
        "From the front to the back.",
        "--config FILE",
    ):
        assert words in shown, words
    assert "default: None" not in shown
    assert "default: ()" not in shown


def test_help_shows_the_choices_of_an_optional_literal(capsys):
    """A user cannot guess the names of what may be chosen."""
    with pytest.raises(SystemExit):
        parse_flags((Engine,), ["--help"], CAR)
    assert "{electric,crank}" in capsys.readouterr().out


def test_every_missing_flag_is_named_at_once():
    """One missing flag per attempt would cost as many attempts."""

    @dataclass(frozen=True, kw_only=True)
    class Two:
        """Two."""

        first: int
        """One."""
        second: float
        """Other."""

    with pytest.raises(FlagError, match=r"--first.*--second"):
        parse_flags((Two,), [], Command())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--num-cylinders", "four"), ("--num-cylinders", "'four'", "int")),
        (("--num-cylinders", "4.0"), ("--num-cylinders", "'4.0'", "int")),
        (("--num-cylinders", ""), ("--num-cylinders", "int")),
        (("--num-cylinders",), ("--num-cylinders", "one argument")),
        (("--num-cylinders", "0"), ("--num-cylinders must be at least 1", "is 0")),
        ((*NEEDED, "--bore", "wide"), ("--bore", "'wide'", "float")),
        ((*NEEDED, "--bore"), ("--bore", "one argument")),
        ((*NEEDED, "--fuel", "water"), ("--fuel", "'water'", "petrol", "diesel")),
        ((*NEEDED, "--starter", "rope"), ("--starter", "'rope'", "electric", "crank")),
        ((*NEEDED, "--colors"), ("--colors", "at least one argument")),
        ((*NEEDED, "--turbo=yes"), ("--turbo", "'yes'")),
        ((*NEEDED, "--turbo", "yes"), ("yes",)),
        ((*NEEDED, "stray"), ("stray",)),
        ((*NEEDED, "-turbo"), ("-turbo",)),
        ((*NEEDED, "--config"), ("--config",)),
    ],
)
def test_wrong_value_names_the_flag_and_the_value(arguments, words):
    """A message without the flag sends its reader through twenty of them."""
    message = message_of(*arguments)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("--num-cylinder", "--num-cylinders"),
        ("--num_cylinders", "--num-cylinders"),
        ("--numcylinders=4", "--num-cylinders"),
        ("--no-turbos", "--no-turbo"),
        ("--colours", "--colors"),
        ("--Turbo", "--turbo"),
        ("--num-c", "--num-cylinders"),
    ],
)
def test_unknown_option_names_the_nearest(flag, nearest):
    """argparse alone would complain of the missing flags first, and of the unknown one without a
    way out.
    """
    message = message_of(flag)
    assert flag.split("=")[0] in message
    assert message.endswith(f"did you mean {nearest}?")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("--use_ema", "; see --help"),  # was --seed
        ("--gpus", "; see --help"),  # was --geglu
        ("--ou", "; see --help"),
        ("--lr-warmup", "; did you mean --lr-warmup-iters or --lr-warmup-fraction?"),
        ("--lr_warmup_iter", "; did you mean --lr-warmup-iters?"),
        ("--lrr", "; did you mean --lr?"),
        ("--dq", "; did you mean --dp?"),
    ],
)
def test_a_suggestion_is_near(name, said):
    """A suggestion of something else is worse than none: it is tried."""
    names = "--lr --dp --seed --geglu --outlier-delay --lr-warmup-iters --lr-warmup-fraction"
    assert nearest(name, names.split()) == said


def test_unknown_option_like_no_other_points_to_help():
    """A wild guess at what was meant is worse than none."""
    assert message_of(*NEEDED, "--zzqqzz") == "unknown option --zzqqzz; see --help"


@pytest.mark.parametrize("flag", ["--num-cyl", "--turb", "--col", "--conf"])
def test_abbreviations_are_refused(flag):
    """A script that says --num-cyl would change its meaning when another flag of that beginning is
    added.
    """
    assert f"unknown option {flag}" in message_of(*NEEDED, flag, "1")


def test_only_booleans_have_a_no():
    """`--no-bore` would be swallowed as an abbreviation or set None."""
    assert "unknown option --no-bore" in message_of(*NEEDED, "--no-bore")


def test_yaml_gives_options_and_flags_win(write_yaml):
    """A file that wins over the command line makes sweeps over one flag train the same model every
    time.
    """
    path = write_yaml(
        "bore: 9.5\nfuel: diesel\nturbo: true\nnum_doors: 5\ncolors: [red, blue]\nname: x y\n"
    )
    engine, body = parse("--config", path)
    assert (engine.bore, engine.fuel, engine.turbo) == (9.5, "diesel", True)
    assert (body.num_doors, list(body.colors), body.name) == (5, ["red", "blue"], "x y")
    for arguments in (
        ("--config", path, "--bore", "1", "--no-turbo", "--colors", "green"),
        ("--bore", "1", "--no-turbo", "--colors", "green", "--config", path),
        ("--bore", "1", f"--config={path}", "--no-turbo", "--colors", "green"),
    ):
        engine, body = parse(*arguments)
        assert (engine.bore, engine.turbo, list(body.colors), body.num_doors) == (
            1.0,
            False,
            ["green"],
            5,
        )


def test_yaml_satisfies_required_flags(write_yaml):
    """A file with all options would be of no use if the required ones had to be said again."""
    engine, _ = parse_flags((Engine, Body), ["--config", write_yaml("num_cylinders: 6")], Command())
    assert engine.num_cylinders == 6


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("bore: 1e-3", "bore", 0.001),  # YAML 1.1 reads it as text
        ("bore: -1.0e-3", "bore", -0.001),
        ("bore: 4", "bore", 4.0),
        ("turbo: false", "turbo", False),
        ("filtered: false", "filtered", False),
        ("filtered: no", "filtered", False),
        ("bore: null", "bore", 8.5),
        ("num-cylinders: 8", "num_cylinders", 8),
        ("starter: crank", "starter", "crank"),
    ],
)
def test_yaml_values(write_yaml, text, field, expected):
    """`1e-3` is text to YAML, and null is no value: both are what users write."""
    engine, _ = parse_flags(
        (Engine, Body),
        ["--config", write_yaml(("" if "cylinders" in text else "num_cylinders: 4\n") + text)],
        Command(),
    )
    assert getattr(engine, field) == expected


def test_yaml_date_is_text(write_yaml):
    """YAML makes a date of one, which would be refused where an option takes text."""
    assert parse("--config", write_yaml("name: 2025-06-30"))[1].name == "2025-06-30"


def test_yaml_paths_are_expanded_as_by_a_shell(write_yaml, monkeypatch):
    """A checkpoint would be saved to a folder named `~`."""
    monkeypatch.setenv("HOME", "/home/me")
    assert parse("--config", write_yaml("name: ~/${HOME}/runs"))[1].name == "/home/me//home/me/runs"


def test_yaml_text_like_a_flag_is_a_value(write_yaml):
    """A name that begins with a dash would be read as an option from the file."""
    assert parse("--config", write_yaml("name: --turbo"))[1].name == "--turbo"
    assert parse("--config", write_yaml("name: '-5'"))[1].name == "-5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_cylinder: 4", ": unknown option 'num_cylinder'; did you mean num-cylinders?"),
        ("colours: [red]", ": unknown option 'colours'; did you mean colors?"),
        ("engine: {bore: 1}", ": unknown option 'engine'"),
        ("3: 4", ": unknown option '3'; see --help"),
        ("config: other.yaml", ": unknown option 'config'"),  # keys are fields, and no other flags
        ("help: true", ": unknown option 'help'"),
        ("h: true", ": unknown option 'h'"),
        ("no_turbo: false", ": unknown option 'no_turbo'; did you mean turbo?"),
        ("- bore\n- 3", " must map options to values, but holds list"),
        ("just text", " must map options to values, but holds str"),
        ("", " must map options to values, but is empty"),
        ("bore: wide", ": 'bore' must be a number, but is 'wide'"),
        ("bore: {a: 1}", ": 'bore' must be a number, but is {'a': 1}"),
        ("bore: [1.0]", ": 'bore' must be a number, but is [1.0]"),
        ("fuel: water", ": 'fuel' must be one of petrol, diesel, but is 'water'"),
        ("starter: rope", ": 'starter' must be one of electric, crank, but is 'rope'"),
        ("num_doors: [2, 3]", ": 'num_doors' must be a whole number, but is [2, 3]"),
        ("num_doors: false", ": 'num_doors' must be a whole number, but is False"),
        ("num-doors: 2.5", ": 'num-doors' must be a whole number, but is 2.5"),
        ("turbo: 'yes'", ": 'turbo' must be true or false, but is 'yes'"),
        ("turbo: [true]", ": 'turbo' must be true or false, but is [True]"),
        ("turbo: 1", ": 'turbo' must be true or false, but is 1"),
        ("name: true", ": 'name' must be text, but is True"),
        ("name: {a: 1}", ": 'name' must be text, but is {'a': 1}"),
        (
            "colors: [[red], [blue]]",
            ": 'colors' must be a list of at least one text, but is [['red'], ['blue']]",
        ),
        (
            "colors: [red, {a: 1}]",
            ": 'colors' must be a list of at least one text, but is ['red', {'a': 1}]",
        ),
        ("colors: {a: 1}", ": 'colors' must be a list of at least one text, but is {'a': 1}"),
        (
            "colors: []",
            ": 'colors' must be a list of at least one text, but is []",
        ),  # would ask for another way of data
        ("bore: 3\nfuel: a: b", ":2: mapping values are not allowed in this context"),
        ("bore: 1\nbore: 2", "'bore' is given twice"),
        ("bore: 1\n--- \nbore: 2", ": but found another document"),
    ],
)
def test_wrong_yaml_names_file_key_and_value(write_yaml, text, message):
    """A file of forty lines of which one is wrong must say which; "unrecognized arguments: 3" tells
    nothing.
    """
    path = write_yaml(text)
    found = message_of(*NEEDED, "--config", path)
    assert found.startswith(f"--config {path}")
    assert message in found


def test_yaml_key_given_twice_names_its_line(write_yaml):
    """The wrong line sends its reader to a place that is right."""
    path = write_yaml("bore: 1\nname: x\nbore: 2")
    assert f"{path}:3: " in message_of(*NEEDED, "--config", path)


def test_yaml_key_given_twice_in_two_spellings_is_refused(write_yaml):
    """In a long file the second value would win without a word."""
    assert "twice" in message_of(*NEEDED, "--config", write_yaml("num_doors: 2\nnum-doors: 3"))


def test_config_of_no_file(tmp_path):
    """A missing file must be an error: training with the defaults instead wastes the run."""
    path = tmp_path / "none.yaml"
    assert str(path) in message_of(*NEEDED, "--config", str(path))
    assert str(tmp_path) in message_of(*NEEDED, "--config", str(tmp_path))
    message_of(*NEEDED, "--config=")


def test_yaml_that_is_not_utf_8(tmp_path):
    """A spreadsheet export in another encoding would end in a traceback."""
    path = tmp_path / "car.yaml"
    path.write_bytes(b"name: \xff\xfe")
    assert str(path) in message_of(*NEEDED, "--config", str(path))


def test_second_config_is_refused(write_yaml):
    """The second file would be ignored without a word."""
    first, second = write_yaml("bore: 1", "first.yaml"), write_yaml("bore: 2", "second.yaml")
    for arguments in (
        ("--config", first, "--config", second),
        (f"--config={first}", f"--config={second}"),
    ):
        assert message_of(*NEEDED, *arguments) == "--config takes one file; put all options into it"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("colors: ['-red', blue]", ("-red", "blue")),  # a file name may begin with a dash
        ("colors: red", ("red",)),
        ("colors: [1, 2.5]", ("1", "2.5")),
        ("colors: null", ()),
    ],
)
def test_lists_in_yaml(write_yaml, text, expected):
    """One file name is not the list of its letters."""
    assert parse("--config", write_yaml(text))[1] == Body(colors=expected)


def test_tuple_field_is_a_tuple():
    """A list in a frozen dataclass can be changed, cannot be hashed, and is unequal to the
    default's tuple.
    """
    assert parse("--colors", "red")[1] == Body(colors=("red",))


def test_what_a_yaml_value_breaks_is_refused_as_on_the_command_line(write_yaml):
    """Values that come as defaults of the parser must not pass by the dataclass."""
    path = write_yaml("num-cylinders: 0")
    with pytest.raises(FlagError, match="--num-cylinders must be at least 1, but is 0"):
        parse_flags((Engine, Body), ["--config", path], Command())
    assert parse_flags((Engine,), ["--config", path, "--num-cylinders", "2"], Command()) == [
        Engine(num_cylinders=2)
    ]


def test_the_last_of_repeated_list_flags_counts():
    """As in Megatron: scripts append what shall override."""
    assert list(parse("--colors", "red", "--colors", "blue", "green")[1].colors) == [
        "blue",
        "green",
    ]


def test_repeatable_list_flags_add_up(write_yaml):
    """A scheduler or a step that is silently left out is not missed."""
    assert list(
        parse_flags((Trip,), ["--stops", "1", "--stops", "2", "3"], Command())[0].stops
    ) == [
        1,
        2,
        3,
    ]
    arguments = ["--config", write_yaml("stops: [9]\n"), "--stops", "1", "--stops", "2"]
    assert list(parse_flags((Trip,), arguments, Command())[0].stops) == [1, 2]


@dataclass(frozen=True, kw_only=True)
class Trip:
    """Where to."""

    stops: tuple[int, ...] = field(default=(), metadata={"repeatable": True})
    """On the way."""
    goal: str | None = field(default=None, metadata={"positional": True})
    """Name of a place."""
    days: int = 1
    """How long."""


@pytest.mark.parametrize("arguments", [["Rome", "--days", "3"], ["--days", "3", "Rome"]])
def test_positional_field(arguments):
    """A file's name before or after the flags."""
    assert parse_flags((Trip,), arguments, Command()) == [Trip(goal="Rome", days=3)]
    assert parse_flags((Trip,), [], Command()) == [Trip()]
