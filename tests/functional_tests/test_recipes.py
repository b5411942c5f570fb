"""A recipe as it stands in the file, with a model of its kind."""

from pathlib import Path

from examples.recipes.try_recipe import try_recipe
from tests.functional_tests.forked_runs import train_forked

RECIPE = Path(__file__).parents[2] / "examples" / "recipes" / "qwen3-8b-lora.yaml"


def test_a_recipe_trains(tmp_path):
    """Options that exist may contradict the data, the model's files or one another; `make recipes`
    tries them all.
    """
    _, _, _, *arguments = try_recipe(RECIPE, tmp_path)
    status, output = train_forked(1, arguments)
    assert status == 0, output
    assert "step 2/2" in output
    assert (tmp_path / "out" / "adapter_config.json").is_file()
