"""`python -m neuronx_distributed_training CONFIG.yaml ...`: as `nxdt-train`."""

from nxd_jax.training import command

if __name__ == "__main__":
    command.main()
