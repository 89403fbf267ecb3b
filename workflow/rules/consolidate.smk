rule consolidate_run:
    input:
        trained=PATHS.train_receipt,
        plan=ancient(PATHS.plan),
    output:
        receipt=PATHS.model_receipt,
    log:
        "logs/{run}/consolidate.log",
    threads: planned("consolidate", "cpus")
    resources:
        **resources_of("consolidate"),
    params:
        settings=settings("consolidate"),
    message:
        message_of("consolidate", "merging the sharded checkpoint into a model folder that from_pretrained loads")
    shell:
        command("consolidate {wildcards.run} --workers {threads} 2>&1 | tee -i {log:q}")
