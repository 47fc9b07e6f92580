from typing import Any


def run_generate(job: dict[str, Any]) -> dict[str, Any]:
    raise NotImplementedError
