FIGURES = ["loss", "optimizer", "speed", "memory", "by-length"]


rule report_run:
    input:
        done=lambda wildcards: final_receipt(wildcards.run),
        evaluation="runs/{run}/evaluation.json",
        trained="runs/{run}/train/receipt.json",
    output:
        page=report("runs/{run}/report.html", caption="../report/page.rst", category="{run}"),
        figures=[
            report(f"runs/{{run}}/figures/{figure}.svg", caption=f"../report/{figure}.rst", category="{run}")
            for figure in FIGURES
        ],
    log:
        "logs/{run}/report.log",
    localrule: True
    conda:
        "../../envs/train.yaml"
    params:
        config=CONFIG_FLAGS,
    message:
        "{wildcards.run}: putting losses, speed, memory and samples on one page, {output.page}"
    shell:
        """
        shardmake report {wildcards.run} \
            {params.config} \
            2>&1 | tee -i {log}
        """
