# The Java client's part of the Makefile. What it needs: a JDK of 17 or newer and Maven, which keeps what it
# downloads once in ~/.m2. The stubs are made by the build, so that they are always fresh.

MVN_JAVA := cd client/java && mvn --batch-mode --no-transfer-progress -Dorg.slf4j.simpleLogger.defaultLogLevel=warn

.PHONY: check-java
check-java: ## The Java client: format, and javac with every warning as an error
	$(MVN_JAVA) spotless:check test-compile

.PHONY: test-java
test-java: ## The Java client's own tests
	$(MVN_JAVA) test

.PHONY: proto-java
proto-java: ## Generate the Java stubs, below client/java/target
	$(MVN_JAVA) protobuf:generate
