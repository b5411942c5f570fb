"""The two sides of `config_fields`: what transformers computes from a folder, and what the product
computes, both in float64 and of the same sequences.

Both sides live in one process of one rank, which computes any number of folders one after the
other.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.packing.model.pipeline import PackedPasses
from megatron.sft.model.build import build_model, build_transformer_config
from megatron.sft.model.forward import forward_step
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.pretrained import open_pretrained
from megatron.sft.model.huggingface.read import Pretrained
from megatron.sft.options.config import SFTConfig
from tests.functional_tests import hf_models
from tests.functional_tests.oracle import CPU, _prepare, draws_of

SEQUENCES = hf_models.sequences_in_order(5, (40, 23))
_OF_CLASSES = {
    "default_rope_type",
    "default_theta",
    "ignore_keys_at_rope_validation",
    "sub_configs",
}
"""Attributes of config classes that are no fields."""
_MAX_NUMBERS = 4_000_000
_TRAINING_OPTIONS = ("attention_dropout", "hidden_dropout", "moe_aux_loss_coeff")


class Computed(NamedTuple):
    """What a side makes of one folder."""

    logits: list[Tensor]
    """Of each sequence, [length, vocabulary]."""
    differs_in_training: bool
    """True if training computes otherwise: dropout, or losses of routers."""


class TransformersSide:
    """transformers' models of folders. Equal names and shapes of tensors get equal values, so that
    only config.json makes a difference.
    """

    def __init__(self) -> None:
        self.reads: set[str] = set()
        """Names of the attributes that code of models reads of configs."""
        self._widened: set[str] = set()

    def write_weights(self, folder: Path) -> str:
        """Writes model.safetensors for the config.json in `folder`. Returns a digest of names and
        shapes. What transformers raises is passed on.
        """
        config_text = (folder / "config.json").read_text()
        with torch.device("meta"):
            model = self._class(folder).from_config(self._config(folder))
        num_numbers = sum(tensor.numel() for tensor in model.state_dict().values())
        if num_numbers > _MAX_NUMBERS:  # a size is missing, and of a released model then
            raise ValueError(f"left out: a model of {num_numbers} numbers")
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        digest = hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()[:16]
        kept = folder.parent / f"weights-{digest}"
        if not kept.exists():
            model = self._class(folder).from_config(self._config(folder))
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    seed = zlib.crc32(name.encode())
                    random = torch.Generator().manual_seed(seed)
                    mean = 1.0 if tensor.dim() == 1 else 0.0
                    values = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
                    tensor.copy_(values * 0.2 + mean)
            model.save_pretrained(kept)
        for file in folder.glob("*.safetensors"):
            file.unlink()
        for file in kept.glob("*.safetensors"):
            (folder / file.name).symlink_to(file)
        assert (folder / "config.json").read_text() == config_text
        return digest

    def compute(self, folder: Path) -> Computed:
        """Returns what transformers computes. What it raises is passed on."""
        torch.set_default_dtype(torch.float32)
        with self._noted():
            model, loading = self._class(folder).from_pretrained(
                folder,
                dtype=torch.float64,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
            )
            odd = {name: found for name, found in loading.items() if found}
            if odd:
                raise ValueError(f"the weights do not fit: {odd}")
            self._widen(model)
            model.eval()
            inputs = [torch.from_numpy(sample.tokens)[None] for sample in SEQUENCES]
            with torch.no_grad():
                logits = [model(input_ids=ids).logits[0] for ids in inputs]
                model.train()
                torch.manual_seed(1)
                trained = model(input_ids=inputs[0], labels=inputs[0])
        plain = cross_entropy(logits[0][:-1], inputs[0][0, 1:])
        differs = (
            not torch.equal(trained.logits[0], logits[0])
            or abs(trained.loss.item() - plain.item()) > 1e-5  # of float32
        )
        return Computed(logits, differs)

    def declared(self, folder: Path) -> set[str]:
        """Returns the names of the fields of the folder's config classes, and their other names."""
        config = self._config(folder)
        inner = (getattr(config, name) for name in config.sub_configs)
        parts = [config, *(part for part in inner if part is not None)]
        return {
            name
            for part in parts
            for name in (*(field.name for field in fields(part)), *part.attribute_map)
        }

    def fields_read(self, folder: Path) -> set[str]:
        """Returns the fields that were read of the folder's configs; not methods and properties."""
        config = self._config(folder)
        kinds = [type(config), *(type(getattr(config, name)) for name in config.sub_configs)]
        names = (name for name in self.reads if name not in _OF_CLASSES)
        return {
            name
            for name in names
            if not any(
                callable(member := getattr(kind, name, None)) or isinstance(member, property)
                for kind in kinds
            )
        }

    def _config(self, folder: Path) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(folder)

    def _class(self, folder: Path) -> Any:
        import transformers

        is_multimodal = "text_config" in json.loads((folder / "config.json").read_text())
        if is_multimodal:
            return transformers.AutoModelForImageTextToText
        return transformers.AutoModelForCausalLM

    def _widen(self, model: Any) -> None:
        name = type(model).__module__
        for module in {type(part).__module__ for part in model.modules()} | {name}:
            if module.startswith("transformers.models.") and module not in self._widened:
                hf_models._keep_double(sys.modules[module])
                self._widened.add(module)
        for parameter in model.parameters():
            parameter.data = parameter.data.double()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Notes which attributes of configs are read, by `reads`."""
        from transformers import PreTrainedConfig

        reads, plain = self.reads, PreTrainedConfig.__getattribute__

        def noting(config: Any, name: str) -> Any:
            if not name.startswith("_") and _is_of_a_model(sys._getframe(1)):
                reads.add(name)
            return plain(config, name)

        PreTrainedConfig.__getattribute__ = noting  # type: ignore[method-assign]
        try:
            yield
        finally:
            PreTrainedConfig.__getattribute__ = plain  # type: ignore[method-assign]


def _is_of_a_model(frame: Any) -> bool:
    """Returns whether code of a model or of its rope, mask or loss reads the attribute."""
    name = frame.f_globals.get("__name__", "")
    return ".modeling_" in name or name.endswith(("masking_utils", "loss_utils"))


def _note_reads(reads: set[str]) -> None:
    """Notes which fields of a config.json the product reads; in a forked rank only."""

    class NotingDict(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            reads.add(name)
            return super().get(name, default)

        def __getitem__(self, name: str) -> Any:
            reads.add(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            reads.add(str(name))
            return super().__contains__(name)

    plain = ConfigFields.__init__

    def noting(self: ConfigFields, values: Mapping[str, Any], where: str) -> None:
        plain(self, NotingDict(values), where)

    ConfigFields.__init__ = noting  # type: ignore[method-assign]


class ProductSide:
    """The product's models of folders."""

    def __init__(self) -> None:
        self.reads: set[str] = set()
        """Names of the fields that are read of config.json."""
        self._packs = hf_models._note_logits()
        _note_reads(self.reads)
        self._is_prepared = False
        self._computed: dict[str, list[Tensor]] = {}

    def compute(self, folder: Path) -> Computed:
        """Returns what the product computes. Raises ValueError where it refuses the folder."""
        config = hf_models.options(self._flags(folder), folder, 1)
        torch.set_default_dtype(torch.float64)
        if not self._is_prepared:  # once: groups of each model would keep threads of their own
            _prepare(config, torch.float64)
            self._is_prepared = True
        transformer_config = build_transformer_config(config, CPU, params_dtype=torch.float64)
        assert config.data.vocab_size is not None
        pretrained = open_pretrained(config, config.data.vocab_size)
        assert isinstance(pretrained, Pretrained)
        weights = next(folder.glob("*.safetensors")).resolve().parent.name
        key = f"{weights} {config.model}"  # all that the model depends on
        if key not in self._computed:
            self._computed[key] = self._forward(config, transformer_config, pretrained)
        differs = any(getattr(config.model, name) for name in _TRAINING_OPTIONS)
        return Computed(self._computed[key], differs)

    def _forward(self, config: SFTConfig, transformer_config: Any, pretrained: Pretrained) -> Any:
        """Returns the logits of each sequence."""
        assert config.data.vocab_size is not None
        model = build_model(config, transformer_config, config.data.vocab_size, CPU, pretrained)
        for chunk in model:
            chunk.eval()
        self._packs.clear()
        draws = draws_of(SEQUENCES, "even", "plain", 0, 1)
        PackedPasses(get_forward_backward_func())(
            forward_step_func=forward_step,
            data_iterator=iter(draws),
            model=model[0],
            num_microbatches=len(draws),
            seq_length=config.model.seq_length,
            micro_batch_size=1,
            forward_only=True,
        )
        logits = hf_models.logits_of(SEQUENCES, self._packs, config.data.vocab_size)
        del model
        gc.collect()  # modules and their hooks hold each other
        return logits

    def _flags(self, folder: Path) -> str:
        """Float64 in routers, for models that have them."""
        text = (folder / "config.json").read_text()
        return "--moe-router-dtype fp64" if "experts" in text else ""
