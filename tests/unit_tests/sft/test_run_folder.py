"""The folders of a run: what is refused before any work."""

import pytest

from megatron.sft.options.output import OutputConfig
from megatron.sft.run_folder import prepare_output


def test_a_folder_with_checkpoints_is_not_written_over(tmp_path):
    """A forgotten --load would start anew and put its first checkpoints before those of the old run."""
    prepare_output(OutputConfig(save=str(tmp_path / "new")))
    assert (tmp_path / "new").is_dir()
    (tmp_path / "old/iter_0000007").mkdir(parents=True)
    (tmp_path / "old/latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ValueError, match=r"up to step 7; continue it with --load"):
        prepare_output(OutputConfig(save=str(tmp_path / "old")))
    prepare_output(OutputConfig(save=str(tmp_path / "old"), load=str(tmp_path / "old")))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder that can be written to"):
        prepare_output(OutputConfig(run_dir=str(tmp_path / "file")))
