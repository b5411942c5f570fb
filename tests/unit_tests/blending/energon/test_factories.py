"""Classes of users that open folders in energon: their samples and decoders are used here."""

import pickle
from dataclasses import dataclass

import pytest
from megatron.blending.energon.epathlib.epath import EPath
from megatron.blending.energon.flavors.base_dataset import Sample
from megatron.blending.energon.flavors.webdataset import DefaultDecoderWebdatasetFactory

from megatron.blending.energon import (
    Batch,  # noqa: F401 - named by a dataset.yaml below
    DefaultTaskEncoder,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from tests.unit_tests.blending.folders import write_folder

YAML = f"""__module__: {__name__}
__class__: KIND
field_map: {{conversation: json, imgs: jpgs}}
"""


@dataclass
class ChatSample(Sample):
    conversation: str
    imgs: list[bytes] | None = None


class WholeDecoder:
    """As webdataset's: takes a sample, and gives it with its parts decoded."""

    def __call__(self, sample):
        found = {**sample}
        if "json" in found:
            found["json"] = found["json"].decode()
        if "jpgs" in found:
            found["jpgs"] = pickle.loads(found["jpgs"])
        return found


class ChatWebdataset(DefaultDecoderWebdatasetFactory[ChatSample]):
    __sample_type__ = ChatSample

    def __init__(self, path: EPath, *, auto_decode: bool = True, **kwargs):
        kwargs.pop("decoder", None)
        super().__init__(path, decoder=None, **kwargs)
        if auto_decode:
            self._decoder = WholeDecoder()


class PlainWebdataset(DefaultDecoderWebdatasetFactory[ChatSample]):
    __sample_type__ = ChatSample


class Broken(DefaultDecoderWebdatasetFactory[ChatSample]):
    __sample_type__ = ChatSample

    def __init__(self, path: EPath):
        raise KeyError(path.name)


class WithoutSamples(DefaultDecoderWebdatasetFactory[ChatSample]):
    pass


class Encoder(DefaultTaskEncoder):
    def batch(self, samples):
        return [(sample.conversation, sample.imgs) for sample in samples]


@pytest.fixture
def folder(tmp_path):
    def write(kind):
        parts = {"json": b'{"a": 1}', "jpgs": pickle.dumps([b"x"])}
        shard = [(f"k{number}", parts) for number in range(4)]
        return write_folder(tmp_path / kind, {"s.tar": shard}, YAML.replace("KIND", kind))

    return write


def test_a_class_of_the_program_opens_its_folder(folder):
    """Megatron-Bridge's data sets name such a class; nothing else of them says what samples are."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, data_parallel_group=None)
    dataset = get_train_dataset(
        folder("ChatWebdataset"), batch_size=2, task_encoder=Encoder(), worker_config=config
    )
    loader = get_savable_loader(dataset, worker_config=config)
    assert next(iter(loader)) == [('{"a": 1}', [b"x"])] * 2
    assert pickle.loads(pickle.dumps(dataset)) is not None


def test_without_a_decoder_parts_are_decoded_as_the_encoder_says(folder):
    dataset = get_train_dataset(folder("PlainWebdataset"), batch_size=1, task_encoder=Encoder())
    ((conversation, imgs),) = next(iter(get_savable_loader(dataset)))
    assert (conversation, pickle.loads(imgs)) == ({"a": 1}, [b"x"])


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("Broken", r"Broken: KeyError: 'Broken'"),
        ("WithoutSamples", "WithoutSamples must have a __sample_type__, the class of its samples"),
        ("YAML", f"names Python code, {__name__}.YAML, which is not imported"),
        ("Batch", "Batch, which is not imported"),
    ],
)
def test_other_classes_are_refused(folder, kind, fault):
    with pytest.raises(ValueError, match=fault):
        get_train_dataset(folder(kind), batch_size=1)


def test_what_is_not_used_of_a_class_is_said():
    """A `load_sample` that is never called would leave samples as they are, in silence."""
    with pytest.warns(UserWarning, match=r"Own: of such a class only .* not load_sample; let a"):

        class Own(DefaultDecoderWebdatasetFactory[ChatSample]):
            def load_sample(self, sample):
                return sample
