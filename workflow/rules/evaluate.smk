rule evaluate_run:
    input:
        model=PATHS.model_receipt,
        data=PATHS.data_receipt,
        plan=ancient(PATHS.plan),
    output:
        evaluation=PATHS.evaluation,
    log:
        "logs/{run}/evaluate.log",
    threads: planned("evaluate", "cpus")
    resources:
        **resources_of("evaluate"),
    params:
        settings=settings("evaluate"),
    message:
        message_of(
            "evaluate", "measuring loss and perplexity of the base model and the tuned model, and sampling from both"
        )
    shell:
        command("evaluate {wildcards.run} 2>&1 | tee -i {log:q}")
