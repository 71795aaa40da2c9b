package io.anarchon.client;

import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.util.List;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Signals that come while the JVM shuts down already, which by itself does not hear them.
 *
 * <p>{@code sun.misc.Signal} is the only way to them, and public, though of no standard: it is
 * looked up by its name, so that a JVM without it, or one that was told to leave signals alone,
 * loses no more than this.
 */
final class Signals {
  private static final Logger LOG = LoggerFactory.getLogger("anarchon");
  private static final List<String> NAMES = List.of("INT", "TERM");

  private Signals() {}

  /** Does this at each SIGINT and SIGTERM from now on; returns whether they can be heard. */
  static boolean handle(Runnable action) {
    try {
      Class<?> signal = Class.forName("sun.misc.Signal");
      Class<?> handler = Class.forName("sun.misc.SignalHandler");
      Object handles =
          Proxy.newProxyInstance(
              Signals.class.getClassLoader(),
              new Class<?>[] {handler},
              (proxy, method, arguments) -> {
                action.run();
                return null;
              });
      Method handle = signal.getMethod("handle", signal, handler);
      for (String name : NAMES) {
        handle.invoke(null, signal.getConstructor(String.class).newInstance(name), handles);
      }
      return true;
    } catch (ReflectiveOperationException | RuntimeException none) {
      LOG.debug("this JVM lets no second signal be heard", none);
      return false;
    }
  }
}
