"""Options that act only with another."""

from dataclasses import dataclass, field

import pytest

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, parse_flags


@dataclass(frozen=True, kw_only=True)
class Car:
    """A car."""

    sunroof: bool = False
    engine: str = "diesel"
    seats: int = 4
    trailer: str | None = None
    tint: int = field(default=20, metadata={"only_with": "sunroof"})
    heated: bool = field(default=True, metadata={"only_with": ("sunroof", "seats>=2")})
    glow: int = field(default=0, metadata={"idle_without": "engine=diesel|trailer"})
    spark: float = field(default=1.0, metadata={"idle_without": ("engine!=diesel", "!trailer")})
    hitch: str = field(default="ball", metadata={"only_with": "trailer", "default_holds": True})


def parse(arguments: str, *more: str) -> tuple[Car, list[str]]:
    notes: list[str] = []
    (car,) = parse_flags((Car,), [*arguments.split(), *more], Command(), notes=notes)
    return car, notes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tint 30", "--tint needs --sunroof; pass it, or drop --tint"),
        ("--tint 20", "--tint needs --sunroof; pass it, or drop --tint"),  # its default
        ("--no-sunroof --tint 30", "--tint needs --sunroof; pass it, or drop --tint"),
        ("--no-heated", "--no-heated needs --sunroof; pass it, or drop --no-heated"),
        ("--no-heated --seats 1", "--no-heated needs --sunroof and --seats of at least 2; pass"),
        ("--sunroof --no-heated --seats 1", "--no-heated needs --seats of at least 2; pass it"),
        ("--hitch hook", "--hitch needs --trailer; pass it, or drop --hitch"),
    ],
)
def test_an_option_without_the_one_it_needs_is_refused(arguments, said):
    """Another run starts than the one that was meant: all weights instead of adapters, say."""
    with pytest.raises(FlagError) as failure:
        parse(arguments)
    assert str(failure.value).startswith(said)


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        ("", []),
        ("--sunroof --tint 20 --no-heated", []),
        ("--heated --hitch ball --seats 1", []),
        ("--no-sunroof --tint 20", ["note: --tint has no effect with --no-sunroof"]),
        ("--glow 2", []),
        ("--glow 2 --engine otto --trailer big", []),
        ("--glow 0 --engine otto", []),
        (
            "--glow 2 --engine otto",
            ["note: --glow has no effect without --engine diesel or --trailer"],
        ),
        (
            "--spark 1.0 --trailer big",
            [
                "note: --spark has no effect without --engine other than diesel",
                "note: --spark has no effect with --trailer",
            ],
        ),
    ],
)
def test_an_option_without_effect_gets_a_note(arguments, notes):
    """Who asked for it would look for its effect in the results."""
    assert parse(arguments)[1] == notes


def test_yaml_counts_as_given(tmp_path):
    """Most options of a run stand there."""
    path = tmp_path / "car.yaml"
    path.write_text("tint: 20\n")
    with pytest.raises(FlagError, match="--tint needs --sunroof"):
        parse("--config", str(path))
    assert parse("--sunroof --config", str(path)) == (Car(sunroof=True), [])


def test_implied_values_are_not_what_was_asked_for():
    """A model's folder decides options, of which some have no effect in its model."""
    (car,) = parse_flags((Car,), [], Command(), imply=lambda given: {"tint": 30})
    assert (car.tint, car.sunroof) == (30, False)
    (car,) = parse_flags((Car,), ["--tint", "30"], Command(), imply=lambda given: {"sunroof": True})
    assert car.sunroof
