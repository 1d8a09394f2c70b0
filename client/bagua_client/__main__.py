"""``python -m bagua_client SCRIPT``; see :mod:`bagua_client.launcher`."""

from bagua_client.launcher import main

if __name__ == "__main__":
    main()
