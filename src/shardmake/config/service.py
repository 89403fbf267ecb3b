"""Checks of a run's service, a program that serves its training script from nodes of its own."""

from typing import TYPE_CHECKING

from shardmake.config.script_file import SCRIPT_VARIABLES, SERVICE_VARIABLES, check_variables

if TYPE_CHECKING:
    from shardmake.config.models import Run


def check_service(run: "Run") -> None:
    """Raise a `ValueError` if the settings of a service contradict the run or each other."""
    if run.service is None and run.service_nodes is None:
        return
    if run.service is None:
        raise ValueError(
            "service_nodes need a service with a command. Add the section service, or remove service_nodes"
        )
    if run.service_nodes is None:
        raise ValueError("service needs nodes of its own. Set service_nodes: 1, or remove the section")
    if run.script is None:
        raise ValueError("service is for a script, which sends it requests. Set script, or remove the section")
    if run.nodes is None:
        raise ValueError(
            "service_nodes cannot be combined with a number of nodes that the plan chooses, because the service is "
            "made for a number of ranks. Set nodes"
        )
    check_variables("service.command", [run.service.command], (*SCRIPT_VARIABLES, *SERVICE_VARIABLES[:2]))
