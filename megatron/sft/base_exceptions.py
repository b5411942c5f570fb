"""pure. Errors of libraries, some of which are no Exceptions.

    torch.distributed.checkpoint    CheckpointException, where a rank cannot read or write
    tokenizers, safetensors         PanicException, a failed assertion in Rust code

Both derive from BaseException, so that `except Exception` lets them through.
"""

from megatron.packing.quoting import shortened


def is_failure(error: BaseException) -> bool:
    """Returns whether an error says that something has failed. The others end a program or a
    generator: KeyboardInterrupt, SystemExit, GeneratorExit.
    """
    return not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit))


def describe_failure(error: BaseException) -> str:
    """Returns one line that names an error of a library: `"EOFError"`, `"KeyError: 'bias'"`."""
    text = " ".join(str(error).split())
    # torch's own words are a page about trusting the file, also where its bytes are damaged.
    if "Weights only load failed" in text:
        text = "some bytes are not those that were saved"
    return f"{type(error).__name__}: {shortened(text, most=300)}".removesuffix(": ")
