rule report_run:
    input:
        done=lambda wildcards: final_receipt(wildcards.run),
        evaluation=PATHS.evaluation,
        trained=PATHS.train_receipt,
    output:
        page=report(PATHS.report, caption="../report/page.rst", category="{run}"),
        # a folder, because a figure that has no data is not drawn
        figures=report(
            directory(PATHS.figures), patterns=["{figure}.svg"], caption="../report/figure.rst", category="{run}"
        ),
    log:
        "logs/{run}/report.log",
    localrule: True
    message:
        "{wildcards.run}: putting losses, speed, memory and samples on one page, {output.page}"
    shell:
        "shardmake report {wildcards.run} 2>&1 | tee -i {log}"
