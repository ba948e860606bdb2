"""A Flower client, written for Flower: softmax regression on its part of the data."""

import numpy as np
from flwr.client import NumPyClient


class Client(NumPyClient):
    def __init__(self, x_train, y_train, x_test, y_test):
        self.train = x_train.reshape(len(x_train), -1), y_train
        self.test = x_test.reshape(len(x_test), -1), y_test
        self.weights = np.zeros((self.train[0].shape[1], 10), np.float32)
        self.bias = np.zeros(10, np.float32)

    def get_parameters(self, config):
        return [self.weights, self.bias]

    def fit(self, parameters, config):
        self.weights, self.bias = parameters
        x, y = self.train
        for _ in range(int(config.get("steps", 5))):
            slope = self._probabilities(x)
            slope[np.arange(len(y)), y] -= 1
            self.weights = self.weights - config["lr"] * x.T @ slope / len(y)
            self.bias = self.bias - config["lr"] * slope.mean(0)
        return self.get_parameters({}), len(y), {"loss": self._loss(x, y)}

    def evaluate(self, parameters, config):
        self.weights, self.bias = parameters
        x, y = self.test
        accuracy = float((self._probabilities(x).argmax(1) == y).mean())
        return self._loss(x, y), len(y), {"accuracy": accuracy}

    def _probabilities(self, x):
        outputs = x @ self.weights + self.bias
        exponentials = np.exp(outputs - outputs.max(1, keepdims=True))
        return exponentials / exponentials.sum(1, keepdims=True)

    def _loss(self, x, y):
        return float(-np.log(self._probabilities(x)[np.arange(len(y)), y] + 1e-9).mean())
