rule render_run:
    input:
        plan=PATHS.plan,
    output:
        accelerate=PATHS.accelerate,
        deepspeed=PATHS.deepspeed,
        training=PATHS.training,
        fallbacks=directory(PATHS.fallbacks),
        receipt=PATHS.rendered,
    log:
        "logs/{run}/render.log",
    localrule: True
    params:
        settings=settings("render"),
    message:
        message_of(
            "render", "rendering the Accelerate and DeepSpeed files and checking them with the libraries' own parsers"
        )
    shell:
        command("render {wildcards.run} 2>&1 | tee -i {log:q}")
