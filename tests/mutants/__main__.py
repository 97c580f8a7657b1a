"""`python -m tests.mutants [NAME...]`: take protections away, one by one, and see tests fail."""

import sys

from tests.mutants.runner import bench
from tests.mutants.table import load


def main(names: list[str]) -> int:
    """Run the named mutants, or all; the exit code is 0 when every one was caught."""
    chosen = [one for one in load() if not names or one.name in names]
    unknown = set(names) - {one.name for one in chosen}
    if unknown:
        print(f"no such mutant: {', '.join(sorted(unknown))}")
        return 2
    with bench() as tree:
        problem = tree.check(chosen)
        if problem:
            print(f"{problem}\nthe tests fail without any mutant: nothing can be said")
            return 2
        survivors = 0
        for number, mutant in enumerate(chosen, start=1):
            verdict = tree.attempt(mutant)
            faults = ",".join(f"F{fault}" for fault in mutant.faults)
            print(
                f"{number:3}/{len(chosen)} {verdict.seconds:5.1f} s  {faults:8} "
                f"{mutant.name:48} {verdict.outcome}",
                flush=True,
            )
            if not verdict.caught:
                survivors += 1
                print(verdict.output)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
