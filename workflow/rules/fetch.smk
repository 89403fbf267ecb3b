# Where there is internet. Everything after it reads what was fetched.
rule fetch:
    input:
        local=inputs_of("model", "data"),
    output:
        sources="runs/{run}/sources.json",
    log:
        "logs/{run}/fetch.log",
    localrule: True
    conda:
        "../../envs/workflow.yaml"
    params:
        config=CONFIG_FLAGS,
        settings=settings_of("fetch"),
    message:
        "{wildcards.run}: bringing model and data here, pinned to their commits, so that jobs need no internet"
    shell:
        "shardmake fetch {wildcards.run}" " {params.config}" " 2>&1 | tee -i {log}"
