"""The layouts and cuts that the walker goes through."""

P = "parallel."
LAYOUTS = {
    "dp2": [],
    "ep2_alltoall": [P + "expert=2"],
    "ep2_allgather": [P + "expert=2", P + "dispatcher=allgather"],
    "pp2": [P + "pipeline=2"],
    "pp2_vpp2": [P + "pipeline=2", P + "virtual_pipeline=2"],
}
ALONE = {
    "micro_batch_2": ["training.micro_batch_size=2"],
    "full_recompute": ["training.recompute=full"],
}
# compared with one process that has them too
MTP = ["model.mtp_layers=2"]
MTP_LAYOUTS = {"mtp_pp2": [*MTP, *LAYOUTS["pp2"]], "mtp_ep2": [*MTP, *LAYOUTS["ep2_alltoall"]]}
RESUMED = {"dp2": [], "pp2": LAYOUTS["pp2"], "ep2": LAYOUTS["ep2_alltoall"]}
# name -> (warm-up steps, step of the checkpoint): inside the warm-up, exactly at the switch, before the first step
CUTS = {"inside_warmup": (7, 5), "at_the_switch": (5, 5), "at_step_0": (5, 0)}
# the batch grows 2, 3, 4 within the first 8 samples, so the token budget of the warm-up falls inside a step
RAMP = ["training.batch_ramp=[2,1,8]"]
