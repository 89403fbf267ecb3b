rule fetch_run:
    input:
        inputs_of("model", "data"),
        before=if_chained(sources_before),
    output:
        sources=PATHS.sources,
    log:
        "logs/{run}/fetch.log",
    localrule: True
    params:
        settings=settings("fetch"),
    message:
        message_of("fetch", "fetching the data and the model's description, pinned to their commits")
    shell:
        command("fetch {wildcards.run} --part description 2>&1 | tee -i {log:q}")


# After the plan, so that no weights are downloaded for a run that does not fit.
rule fetch_weights_run:
    input:
        sources=PATHS.sources,
        before=if_chained(model_receipt_before),
        plan=ancient(PATHS.plan),
    output:
        receipt=PATHS.weights_receipt,
    log:
        "logs/{run}/fetch-weights.log",
    localrule: True
    params:
        settings=settings("fetch"),
    message:
        message_of("fetch", "fetching the base model's weights, so that no job needs the internet")
    shell:
        command("fetch {wildcards.run} --part weights 2>&1 | tee -i {log:q}")
