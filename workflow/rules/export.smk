rule consolidate:
    input:
        trained="runs/{run}/train/receipt.json",
        plan=ancient("runs/{run}/plan/plan.json"),
    output:
        receipt="runs/{run}/model/receipt.json",
    log:
        "logs/{run}/consolidate.log",
    conda:
        "../../envs/train.yaml"
    threads: planned("consolidate", "cpus")
    resources:
        mem_mb=planned("consolidate", "memory_gib", 1024),
        slurm_partition=CLUSTER.slurm.partition or "",
        slurm_account=CLUSTER.slurm.account or "",
    params:
        config=CONFIG_FLAGS,
        settings=settings_of("consolidate"),
    message:
        "{wildcards.run}: merging the sharded checkpoint into a model folder that from_pretrained loads"
    shell:
        """
        shardmake consolidate {wildcards.run} \
            {params.config} \
            --workers {threads} \
            2>&1 | tee -i {log}
        """


rule evaluate:
    input:
        model="runs/{run}/model/receipt.json",
        data="runs/{run}/data/receipt.json",
        plan=ancient("runs/{run}/plan/plan.json"),
    output:
        evaluation="runs/{run}/evaluation.json",
    log:
        "logs/{run}/evaluate.log",
    conda:
        "../../envs/train.yaml"
    threads: planned("evaluate", "cpus")
    resources:
        mem_mb=planned("evaluate", "memory_gib", 1024),
        gres=lambda wildcards: gpus_of(wildcards.run),
        slurm_partition=CLUSTER.slurm.partition or "",
        slurm_account=CLUSTER.slurm.account or "",
    params:
        config=CONFIG_FLAGS,
        settings=settings_of("evaluate"),
    message:
        "{wildcards.run}: measuring loss and perplexity of the base and the tuned model, and letting both answer"
    shell:
        """
        shardmake evaluate {wildcards.run} \
            {params.config} \
            2>&1 | tee -i {log}
        """


rule push:
    input:
        model="runs/{run}/model/receipt.json",
        evaluation="runs/{run}/evaluation.json",
    output:
        receipt="runs/{run}/push/receipt.json",
    log:
        "logs/{run}/push.log",
    localrule: True
    conda:
        "../../envs/workflow.yaml"
    params:
        config=CONFIG_FLAGS,
        settings=settings_of("push"),
    message:
        "{wildcards.run}: pushing the model and reading back what arrived"
    shell:
        """
        shardmake push {wildcards.run} \
            {params.config} \
            2>&1 | tee -i {log}
        """
