"""How a separate process answers questions."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer each line of JSON on standard input, {"do": NAME, arguments…}, by the function's result as one line.

    An exception ends the process, with a traceback on standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(functions[request.pop("do")](**request)), file=answers, flush=True)
