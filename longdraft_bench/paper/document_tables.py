"""The tables of docs/benchmarks.md, from the results in benchmarks/results/, between the document's markers.

    longdraft bench tables            # rewrites the document
    longdraft bench tables --check    # exit status 1 if the document differs from the results

    <!-- paper-small.jsonl 3 5 : alpha -->     α in the tables 3 and 5 of benchmarks/results/paper-small.jsonl
    <!-- end -->
    <!-- segments.jsonl extrapolated : minutes -->     estimates for a whole text (extrapolate.py)
    <!-- end -->
"""

from __future__ import annotations

import re
from dataclasses import replace

from longdraft_bench.document import RESULTS, ROOT, in_checkout
from longdraft_bench.paper import experiment, extrapolate, measures
from longdraft_bench.results import read_results

DOCUMENT = ROOT / "docs" / "benchmarks.md"
_MARKED = re.compile(r"(<!-- (\S+\.jsonl) ([\w ]+): ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The document with new tables."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{_tables(match[2], match[3].split(), match[4].split())}\n"
                       f"{match[5]}", text)


def _tables(file: str, ids: list[str], chosen: list[str]) -> str:
    results = read_results(RESULTS / file)
    session = results.sessions[0]
    if ids == ["extrapolated"]:
        chosen_tables = [extrapolate.table(results, 4096, 100_000)]
    else:
        plan = experiment.load_experiment(session["experiment"]).chosen(ids)
        plan = replace(plan, tables=tuple(
            replace(table, measures=tuple(name for name in table.measures if name in chosen))
            for table in plan.tables))
        chosen_tables = measures.tables(results, plan, plan.scale(session["scale"]))
    origin = (f"Model `{session['model']}`, weights sha256 {session['weights_sha256'][:12]}, "
              f"commit {session['commit']}, {session['processor']}, {session['threads']} threads, "
              f"seeds {results.seeds}, prompt {session['prompt_sha256'][:12]}; measured {session['began'][:10]}.")
    return "\n".join([origin, "", *(table.markdown() for table in chosen_tables)])


def differs() -> bool:
    """Whether the document differs from the results. Raises UsageError without a checkout."""
    text = in_checkout(DOCUMENT).read_text(encoding="utf-8")
    return written(text) != text


def rewrite() -> None:
    """Write the tables into the document. Raises UsageError without a checkout."""
    text = in_checkout(DOCUMENT).read_text(encoding="utf-8")
    DOCUMENT.write_text(written(text), encoding="utf-8")
