rule report_run:
    input:
        done=lambda wildcards: final_receipt(wildcards.run),
        evaluation=PATHS.evaluation,
        trained=PATHS.train_receipt,
    output:
        page=report(PATHS.report, caption="../report/page.rst", category="Runs", labels=losses_of),
        # a folder, because a figure that has no data is not drawn
        figures=report(
            directory(PATHS.figures),
            patterns=["{figure}.svg"],
            caption="../report/figure.rst",
            category="{run}",
            labels={"figure": "{figure}"},
        ),
    log:
        "logs/{run}/report.log",
    localrule: True
    message:
        "{wildcards.run}: putting losses, speed, memory and samples on one page, {output.page}"
    shell:
        command("report {wildcards.run} 2>&1 | tee -i {log:q}")


rule compare_sweep:
    input:
        lambda wildcards: [str(RunDir(Path("runs", run)).report) for run in CONFIG.sweeps[wildcards.sweep]],
    output:
        page=report(
            "compare/{sweep}.html", caption="../report/compare.rst", category="Sweeps", labels={"sweep": "{sweep}"}
        ),
    log:
        "logs/compare-{sweep}.log",
    localrule: True
    message:
        "{wildcards.sweep}: comparing the runs of the sweep on one page, {output.page}"
    shell:
        command("compare --sweep {wildcards.sweep} --page {output.page:q} 2>&1 | tee -i {log:q}")
