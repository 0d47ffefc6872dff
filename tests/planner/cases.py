"""Requests for plans that tests evaluate: the tiny experiments on modelled machines."""

from realrl.config.compose import compose
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.planner.request import Request
from realrl.planner.settings import PlanSettings
from realrl.profiler.hardware_files import named_hardware

LENGTHS = "prompt=uniform:4,16 response=uniform:2,16"


def request_for(*overrides, name="ppo", devices=8, hardware="h100", lengths=LENGTHS, **settings):
    """A request for an experiment with preset=tiny on `devices` devices, at most eight a node."""
    machine = named_hardware(hardware)
    cluster = (
        f"cluster.n_nodes={-(-devices // 8)}",
        f"cluster.n_devices_per_node={min(8, devices)}",
        f"cluster.device={machine.device.kind}",
    )
    experiment = load_experiment(name)
    config = compose(experiment, ["preset=tiny", "precision=fp32", *cluster, *overrides], config_dir=config_dir())
    return Request(experiment, config, machine, lengths, **settings)


def everywhere(request, allocation):
    """The settings of a plan with all calls in one place."""
    return PlanSettings({mfc.name: allocation for mfc in request.base.mfcs})


def with_critic_apart(request):
    """A plan for four devices or more: the critic has those of the second half."""
    half = request.cluster.n_devices // 2
    places = {
        mfc.name: f"d{half}@0:{half}-{2 * half - 1}" if mfc.role == "critic" else f"d{half}@0:0-{half - 1}"
        for mfc in request.base.mfcs
    }
    return PlanSettings(places)
