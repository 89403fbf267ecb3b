rule fetch:
    input:
        inputs_of("model", "data"),
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
        "{wildcards.run}: bringing data and what a plan needs of the model here, pinned to their commits"
    shell:
        """
        shardmake fetch {wildcards.run} \
            {params.config} \
            --part description \
            2>&1 | tee -i {log}
        """


rule fetch_weights:
    input:
        sources="runs/{run}/sources.json",
        plan=ancient("runs/{run}/plan/plan.json"),
    output:
        receipt="runs/{run}/fetched/weights.json",
    log:
        "logs/{run}/fetch-weights.log",
    localrule: True
    conda:
        "../../envs/workflow.yaml"
    params:
        config=CONFIG_FLAGS,
        settings=settings_of("fetch"),
    message:
        "{wildcards.run}: bringing the base model's weights here, so that no job needs the internet"
    shell:
        """
        shardmake fetch {wildcards.run} \
            {params.config} \
            --part weights \
            2>&1 | tee -i {log}
        """


rule choose_strategy:
    input:
        sources="runs/{run}/sources.json",
    output:
        memory="runs/{run}/plan/memory.json",
        plan="runs/{run}/plan/plan.json",
        figure=report("runs/{run}/plan/memory.svg", caption="../report/plan.rst", category="{run}"),
    log:
        "logs/{run}/plan.log",
    localrule: True
    conda:
        "../../envs/workflow.yaml"
    params:
        config=CONFIG_FLAGS,
        settings=settings_of("plan"),
    message:
        "{wildcards.run}: estimating memory and choosing the fastest strategy that fits, before anything is queued"
    shell:
        """
        shardmake plan {wildcards.run} \
            {params.config} \
            2>&1 | tee -i {log}
        """


rule render:
    input:
        inputs_of("script"),
        plan="runs/{run}/plan/plan.json",
    output:
        accelerate="runs/{run}/plan/accelerate.yaml",
        deepspeed="runs/{run}/plan/deepspeed.json",
        training="runs/{run}/plan/training.json",
    log:
        "logs/{run}/render.log",
    localrule: True
    conda:
        "../../envs/workflow.yaml"
    params:
        config=CONFIG_FLAGS,
        settings=settings_of("plan"),
    message:
        "{wildcards.run}: rendering the Accelerate and DeepSpeed files from the plan and checking them with the libraries' own parsers"
    shell:
        """
        shardmake render {wildcards.run} \
            {params.config} \
            2>&1 | tee -i {log}
        """
