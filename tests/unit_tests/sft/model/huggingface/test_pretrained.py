"""What a run reads of a folder before it starts, or continues."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.sft.model.huggingface import pretrained


class FolderIsRead(Exception):
    """Stands for what is done with the folder's tensors."""


@pytest.mark.parametrize(("has_images", "has_adapters"), [(True, False), (False, True)])
def test_what_a_checkpoint_lacks_is_read_again(
    monkeypatch: pytest.MonkeyPatch, has_images: bool, has_adapters: bool
) -> None:
    """A frozen tower is in no checkpoint: continued without it, a run goes on with random weights
    or NaN.
    """

    def read(folder: str) -> None:
        raise FolderIsRead

    config: Any = SimpleNamespace(
        output=SimpleNamespace(pretrained_checkpoint="model", load="saved", save_hf=None),
        lora=SimpleNamespace(lora=has_adapters),
        images=SimpleNamespace(images=has_images),
        preference=SimpleNamespace(needs_reference=False),
    )
    monkeypatch.setattr(pretrained, "latest_iteration", lambda folder: 2)
    monkeypatch.setattr(pretrained, "distributed_checkpoint", lambda folder: None)
    monkeypatch.setattr(pretrained, "open_folder", read)
    with pytest.raises(FolderIsRead):
        pretrained.open_pretrained(config, 64)
    config.lora.lora = config.images.images = False
    assert pretrained.open_pretrained(config, 64) is None
