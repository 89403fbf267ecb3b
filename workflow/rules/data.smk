rule data_run:
    input:
        inputs_of("model", "data"),  # the tokenizer and its chat template are in the model's folder
        sources=PATHS.sources,
        plan=plan_before_data(),
    output:
        receipt=PATHS.data_receipt,
    log:
        "logs/{run}/data.log",
    threads: planned("data", "cpus")
    resources:
        **resources_of("data"),
    params:
        settings=settings("data"),
    message:
        message_of("data", "tokenizing and packing the data once, so that no rank waits for it")
    shell:
        command("data {wildcards.run} --cpus {threads} 2>&1 | tee -i {log:q}")
