"""Write the tables of docs/benchmarks.md from the results in benchmarks/results/, between the document's markers.

    python benchmarks/tables.py            # rewrites the document
    python benchmarks/tables.py --check    # exit status 1 if the document differs from the results

    <!-- paper-small.jsonl 3 5 : alpha -->     α in the tables 3 and 5 of benchmarks/results/paper-small.jsonl
    <!-- end -->
    <!-- segments.jsonl extrapolated : minutes -->     estimates for a whole text (extrapolate.py)
    <!-- end -->
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import extrapolate

from longdraft_bench.paper import experiment
from longdraft_bench.paper import measures
from longdraft_bench import results

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "benchmarks.md"
_MARKED = re.compile(r"(<!-- (\S+\.jsonl) ([\w ]+): ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(text: str) -> str:
    """The document with new tables."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{_tables(found[2], found[3].split(), found[4].split())}\n"
                       f"{found[5]}", text)


def _tables(file: str, ids: list[str], chosen: list[str]) -> str:
    found = results.read_results(ROOT / "benchmarks" / "results" / file)
    session = found.sessions[0]
    if ids == ["extrapolated"]:
        found_tables = [extrapolate.table(found, 4096, 100_000)]
    else:
        plan = experiment.load_experiment(session["experiment"]).chosen(ids)
        plan = replace(plan, tables=tuple(
            replace(table, measures=tuple(name for name in table.measures if name in chosen))
            for table in plan.tables))
        found_tables = measures.tables(found, plan, plan.scale(session["scale"]))
    origin = (f"Model `{session['model']}`, weights sha256 {session['weights_sha256'][:12]}, "
              f"commit {session['commit']}, {session['processor']}, {session['threads']} threads, "
              f"seeds {found.seeds}, prompt {session['prompt_sha256'][:12]}; measured {session['began'][:10]}.")
    return "\n".join([origin, "", *(table.markdown() for table in found_tables)])


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        return int(written(text) != text)
    DOCUMENT.write_text(written(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
