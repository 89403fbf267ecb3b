rule tokenize:
    input:
        data=inputs_of("data"),
        plan=ancient("runs/{run}/plan/plan.json"),
    output:
        receipt="runs/{run}/data/receipt.json",
    log:
        "logs/{run}/data.log",
    conda:
        "../../envs/train.yaml"
    threads: planned("data", "cpus")
    resources:
        mem_mb=planned("data", "memory_gib", 1024),
        slurm_partition=CLUSTER.slurm.partition or "",
        slurm_account=CLUSTER.slurm.account or "",
    params:
        config=CONFIG_FLAGS,
        settings=settings_of("data"),
    message:
        "{wildcards.run}: tokenizing and packing the data once, so that no rank waits for it"
    shell:
        """
        shardmake data {wildcards.run} \
            {params.config} \
            --cpus {threads} \
            2>&1 | tee -i {log}
        """


# The driver of the training job. Its checkpoints are no declared output: Snakemake would delete them on failure.
rule train:
    input:
        accelerate="runs/{run}/plan/accelerate.yaml",
        deepspeed="runs/{run}/plan/deepspeed.json",
        training="runs/{run}/plan/training.json",
        data="runs/{run}/data/receipt.json",
        weights=ancient("runs/{run}/fetched/weights.json"),
    output:
        receipt="runs/{run}/train/receipt.json",
    log:
        "logs/{run}/train.log",
    localrule: True
    conda:
        "../../envs/train.yaml"
    resources:
        driver=1,
    params:
        config=CONFIG_FLAGS,
    message:
        "{wildcards.run}: training; the driver adopts a running job or submits one, and resumes it until it is done{SUBMISSION:{wildcards.run}}"
    shell:
        """
        shardmake train {wildcards.run} \
            {params.config} \
            2>&1 | tee -i {log}
        """
