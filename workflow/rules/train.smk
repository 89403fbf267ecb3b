# The driver of the training job. The checkpoints are not a declared output: Snakemake would delete them on failure.
rule train_run:
    input:
        accelerate=PATHS.accelerate,
        deepspeed=PATHS.deepspeed,
        training=PATHS.training,
        fallbacks=PATHS.fallbacks,
        rendered=PATHS.rendered,
        data=PATHS.data_receipt,
        weights=if_chained(weights_of, ancient(PATHS.weights_receipt)),
    output:
        receipt=PATHS.train_receipt,
    log:
        "logs/{run}/train.log",
    localrule: True
    resources:
        driver=1,
    message:
        message_of("train", "training; the driver adopts a running job or submits one, and resumes it until it is done")
    shell:
        command("train {wildcards.run} 2>&1 | tee -i {log:q}")
