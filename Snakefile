# Shardmake: from one short config to a pushed model.
#
#   snakemake --profile slurm             every run of config/config.yaml, every stage
#   snakemake --profile slurm plan        stop after the plan: what fits, what is chosen, why
#   snakemake --profile slurm runs/NAME/model/receipt.json -f      one stage again
#
# The rules call the stages of the command line (`shardmake --help`); each works by hand as well.

from snakemake.utils import min_version

min_version("9.20")


configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/plan.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        expand("runs/{run}/report.html", run=RUNS),


rule plan:
    input:
        expand("runs/{run}/plan/training.json", run=RUNS),
