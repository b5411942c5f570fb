"""What tests of the trainer share."""

import pytest

from tests.unit_tests.sft.runs import write_run


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def write_lines(tmp_path):
    """Return a function that writes lines to a file and returns its path."""

    def write(name, *lines):
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines))
        return str(path)

    return write


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a finished run (see `runs`)."""
    write_run(tmp_path)
    return tmp_path
