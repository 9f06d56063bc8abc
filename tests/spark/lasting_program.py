"""A session with a Hive metastore, in a JVM of its own: ``lasting_program.py METASTORE WAREHOUSE SQL…``.

It prints the rows of each statement, as a JSON array a line.
"""

from __future__ import annotations

import json
import sys
import warnings


def main(metastore: str, warehouse: str, *statements: str) -> None:
    warnings.simplefilter("ignore")
    from pyspark.sql import SparkSession

    settings = {
        "spark.sql.warehouse.dir": warehouse,
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={metastore};create=true",
        "spark.hadoop.datanucleus.schema.autoCreateAll": "true",
        "spark.hadoop.hive.metastore.schema.verification": "false",
        # Derby syncs each of the hundreds of changes with which Hive makes its tables.
        "spark.driver.extraJavaOptions": "-Dderby.system.durability=test",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    builder = SparkSession.builder.master("local[1]").enableHiveSupport()
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    for statement in statements:
        print(json.dumps([list(row) for row in spark.sql(statement).collect()]), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
