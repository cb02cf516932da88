"""The programs of shmkv: the `shmkv` command and what it runs."""
