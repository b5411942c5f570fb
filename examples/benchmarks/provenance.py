"""What a page of results says of where it was made."""

import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commit(folder: Path = ROOT) -> str:
    """Returns the short name of a checkout's commit; "" if git knows none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def processor() -> str:
    """Returns the model of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
