"""`python -m mlxdet.backends.metal.check`: try on this machine's GPU what mlxdet says about metal."""

if __name__ == "__main__":
    from mlxdet.cli.device_check import main  # here, as backends know nothing of what is built on them

    main("metal")
