"""The process that fuzzes one target under libFuzzer's guidance; `run.py` starts and reads it.

Usage: worker.py TARGET UNITS TOTALS [libFuzzer's options and directories]. Once UNITS were taken it
writes its totals to the file TOTALS and ends well; a finding ends it with libFuzzer's report, and
the input is saved where `-artifact_prefix` says.
"""

import json
import os
import random
import sys
import traceback

import atheris

with atheris.instrument_imports(include=["kvtierd", "kvtier_client"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until the count is reached."""
    name, units, totals, *options = sys.argv[1:]
    target = TARGETS[name]()

    def take(data: bytes) -> None:
        try:
            target.take(data)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            raise
        if target.counts[target.unit] >= int(units):
            with open(totals, "w") as file:
                json.dump(target.counts, file)
            os._exit(0)

    def mutate(data: bytes, size: int, seed: int) -> bytes:
        return target.mutate(data, size, random.Random(seed), atheris.Mutate)

    with target.set_up():
        atheris.Setup([sys.argv[0], *options], take, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
