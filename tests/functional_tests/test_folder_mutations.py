"""A part of `make folder-mutations`: changed folders beside transformers."""

import pytest

from tests.functional_tests.folders import outcomes
from tests.functional_tests.ranks import run_ranks

pytest.importorskip("transformers")
CHANGES = (
    "older_index_beside_one_file",
    "older_file_beside_shards",
    "index_names_the_wrong_shard",
    "a_tensor_again_in_the_first_shard",
    "adapter_beside",
    "file_named_by_config",
    "quantized_by_config",
    "root_head_unlike_the_embedding",
    "head_instead_of_the_embedding",
    "half_of_the_names_of_transformers_5",
    "names_in_memory",
    "names_of_data_parallel",
)


def test_changed_folders_have_transformers_loss_or_are_refused():
    """Other files or tensors than transformers' are trained, and what is served is another model,
    in silence.
    """
    (found,) = run_ranks(outcomes, 1, ["gemma3-vision"], CHANGES)
    assert [one for one in found if not one.is_right] == []
    assert [one.change for one in found] == [*CHANGES]
