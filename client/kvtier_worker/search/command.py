"""The body of `kvtier-worker search`: run the trial, then show its table and one search."""

from rich.console import Console

from kvtier_worker.cot.demo import require_the_task
from kvtier_worker.load import LoadedModel
from kvtier_worker.search.show import outcome_tree, trial_table
from kvtier_worker.search.trial import TrialPlan, run_trial


def search_and_show(loaded: LoadedModel, plan: TrialPlan) -> None:
    """Errors: UnsupportedModel for a model of another task; those of `run_trial`."""
    require_the_task(loaded)
    console = Console()
    runs = run_trial(
        loaded.model, plan, lambda name: console.print(f"{name}: all problems are searched")
    )
    title = f"{plan.problems} problems of {plan.size.tokens} tokens, temperature {plan.temperature}"
    console.print(trial_table(title, runs))
    name, run = next(reversed(runs.items()))
    if run.last is not None:
        console.print(outcome_tree(f"{name}: the last problem that was answered", run.last))
