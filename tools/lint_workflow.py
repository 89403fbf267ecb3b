"""``snakemake --lint``, without the demand for a conda environment or container per rule.

The Snakefile imports Shardmake, so the rules run in the environment of Snakemake, and a second one would not be used.
"""

from snakemake.cli import main
from snakemake.linting.rules import RuleLinter

if __name__ == "__main__":
    del RuleLinter.lint_missing_software_definition
    main(["--lint", "--configfile", "tests/lint.yaml"])
