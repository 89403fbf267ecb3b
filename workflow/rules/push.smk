rule push_run:
    input:
        model=PATHS.model_receipt,
        evaluation=PATHS.evaluation,
    output:
        receipt=PATHS.push_receipt,
    log:
        "logs/{run}/push.log",
    localrule: True
    params:
        settings=settings("push"),
    message:
        message_of("push", "pushing the model and reading it back to verify it")
    shell:
        command("push {wildcards.run} 2>&1 | tee -i {log:q}")
