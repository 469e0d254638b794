"""`python -m mlxdet.backends.cuda.check`: try on this machine's GPU what mlxdet says about cuda."""

if __name__ == "__main__":
    from mlxdet.cli.device_check import main  # here, as backends know nothing of what is built on them

    main("cuda")
