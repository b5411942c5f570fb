"""pure. Parses the text of a JSON file; an error is one line with file and line number."""

import json
from typing import Any


def parse_json(path: str, text: str, way_out: str = "fix the file") -> Any:
    """Returns the value of `text`, the content of the file `path`. Raises ValueError, naming file
    and line, if it is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        fault = (
            f"{path}:{error.lineno}: not JSON: {error.msg.removesuffix(' at')} at column "
            f"{error.colno}"
        )
    except RecursionError:
        fault = f"{path}: not JSON that can be read: nested too deep"
    except ValueError as error:  # a number of thousands of digits
        fault = f"{path}: not JSON that can be read: {error}"
    raise ValueError(f"{fault}; {way_out}")
