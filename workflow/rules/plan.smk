rule plan_run:
    input:
        sources=PATHS.sources,
    output:
        # memory.json is written as well. It is not declared, because Snakemake would remove it when the plan refuses.
        plan=PATHS.plan,
        table=report(PATHS.memory_table, caption="../report/plan.rst", category="{run}", labels={"figure": "plan"}),
    log:
        "logs/{run}/plan.log",
    localrule: True
    params:
        settings=settings("plan"),
    message:
        message_of("plan", "estimating memory and choosing the fastest strategy that fits, before anything is queued")
    shell:
        command("plan {wildcards.run} 2>&1 | tee -i {log:q}")
