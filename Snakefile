# The entrance of Shardmake for `snakemake` in the top folder; the workflow is in workflow/Snakefile.


include: "workflow/Snakefile"


# Snakemake ignores the default target of an included file, so it is named again here.
rule all:
    default_target: True
    input:
        rules.report.input,
